"""Work of the host: validation, plans, caches, masks' tables, profiling, packaging."""
