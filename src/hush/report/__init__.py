"""Tables, plots and the page that shows them."""
