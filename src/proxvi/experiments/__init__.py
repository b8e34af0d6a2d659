"""The paper's figure and tables: configuration, run, result files."""
