"""The page of ``explore-schedules``: plans, memory, comparisons and recorded runs.

The files in the order in which a request goes through them:

    server               answers the page on this machine
    interface            a request of the page and its answer, the same in a browser's own Python
    case                 what the page's controls say, as a scenario of the simulator
    model_costs          costs of a model on a named GPU; replica_job: what replicas add
    simulated            scenarios that have been simulated, kept for the next request
    shown                a timeline as the page draws it
    export page/         the page as a folder for any file host, with a browser's Python
"""
