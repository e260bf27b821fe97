"""From a configuration to all that a run needs, before anything is written.

It gives `prepare`, whose `Job` has the model, the rows, the optimizer and the open settings filled in. May import
configuration.
"""
