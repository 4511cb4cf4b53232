"""tilelang programs, one module a family: ``program(op, config)`` returns the steps of a call."""
