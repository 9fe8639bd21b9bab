"""The page of ``watch-run``: the records of training runs as curves and tables.

The files in the order in which a record goes through them:

    sources growing_file         the files of a run, read on while they grow
    record records_file          a line as a record; damaged and hostile lines
    run table                    a run: its figures by iteration, restarts and newest values
    charts page_data by_rank     curves, tables and bars as data for the page
    promise                      what a plan promised, beside what is measured
    watched                      all runs of a page
    static_page server page/     the page as one file, or served on this machine
"""
