"""What happens on the host: validation, plans, caches, masks' tables, profiling, packaging."""
