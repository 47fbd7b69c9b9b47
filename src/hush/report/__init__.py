"""Tables, figures, the demonstration and the report of a run."""
