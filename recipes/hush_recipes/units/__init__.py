"""Privacy of people who own several records."""
