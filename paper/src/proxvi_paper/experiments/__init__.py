"""Figure 1, tables 1 to 3 and logistic regression: each has a grid of trials and a report of the result files."""
