"""The highest accuracies at a sound epsilon, settings chosen without the test records."""
