"""The models of the paper's experiments, as NumPyro models and guides."""
