"""Sources of records: data sets, tables and memory-mapped arrays, read a physical batch at a time."""
