"""The experiments of the paper "Proximity Variational Inference", with proxvi: models, data sets, trials, plots."""
