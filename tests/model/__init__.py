"""The scheduler against a modelled executor: every mode must give the tokens that a request gets alone."""
