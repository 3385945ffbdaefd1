"""A result as JSON, as a table in the terminal, as a page and as pictures."""
