"""Parts of this project for other people's code: plans, vocabulary layers, a runner of stages.

``plans`` has schedules as data and needs no torch, ``vocabulary`` the layers of a large vocabulary
as modules, ``runner`` the executor for one's own layers. docs/library.md shows how each is used.
"""
