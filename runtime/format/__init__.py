"""The bundle format: canonical JSON, expressions, dtypes, architecture rules, the manifest, the container.

The one part of the runtime that the compiler and the build share with it.
"""
