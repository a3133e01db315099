"""Pages and examples: their code runs, and their figures are those of the record."""
