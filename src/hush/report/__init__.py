"""Tables, figures and the demonstration report."""
