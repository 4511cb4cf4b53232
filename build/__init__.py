"""Building bundles without a GPU, and running them on one: toolchain, cache, workers, bundle writer, command line."""
