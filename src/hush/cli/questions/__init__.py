"""Privacy questions: what plans and ledgers cost and mean. They load no deep-learning library."""
