"""The engine core: requests, KV blocks and every scheduling decision. No torch."""
