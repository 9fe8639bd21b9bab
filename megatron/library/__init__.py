"""Parts of this project for other people's code: plans, vocabulary layers, a runner of stages.

``plans`` makes schedules as data, and needs no torch. ``vocabulary`` has the layers of a large
vocabulary as modules. ``runner`` runs the caller's own layers. docs/library.md shows how to use
each of them.
"""
