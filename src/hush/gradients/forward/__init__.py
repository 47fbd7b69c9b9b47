"""Forward passes as the tape sees them: intercepted, with their checkpoints and their modules."""
