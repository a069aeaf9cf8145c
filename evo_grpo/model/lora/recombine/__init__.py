"""New adapters from the products s B A of others: one file per operator."""
