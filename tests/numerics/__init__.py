"""Results of public functions against the oracle, and those of integrations."""
