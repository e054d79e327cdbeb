"""Clients that leave, dawdle, flood or lie: what they cost, and what they cannot do."""
