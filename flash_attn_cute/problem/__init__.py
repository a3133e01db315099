"""A call as data: its inputs and specification, tables of its block mask, lengths and windows of its sequences."""
