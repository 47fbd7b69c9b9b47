"""One flat file per experiment."""
