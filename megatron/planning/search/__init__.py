"""One search for another run like this one: edits, looks, and a rule.

``auto``, "what would fit", the advice after a rank has run out of memory, and "which line for my
GPUs" ask the same question: which of many runs is the fastest that fits? They have one answer.

**Edits.** Another run is this run with some edits of its command line (``run/edit.py``). A
dimension is one property of a run with its choices, and each choice is a few edits
(``run/dimension.py``). A new dimension is one declaration in ``dimensions.py``. The word ``auto``
opens a dimension of ``run/choices.py``: the same type, and often the same declaration.

**Looks.** What is known of a run is its seconds, its bytes, and where both come from
(``planning/known.py``). Each look is closer than the one before, and takes several times its work:

1. a bound: no plan of the run can take less time or hold less. Of a combination of many choices, a
   rough count stands for the bound (``coarse.py``), and combinations that have been looked at
   correct what is expected of the others (``expected.py``);
2. an estimate: a plan of few microbatches, extended by its steady state
   (``planning/estimate.py``). Plans of very many passes first stay in the order of their block,
   without a search;
3. the plan of the run itself, which is what trains.

**The loop.** The search always looks more closely at the run that seems best by all that is known.
It ends when no other run is expected to be better than the best that has been looked at closely.
This is ``look_closer`` in ``schedules/search/fastest.py``. Whoever chooses what is looked at next
uses it:

=================================  ======================  ======================================
who                                which wait for a look   what is enough
=================================  ======================  ======================================
``auto`` (``planning/race.py``)    bounds and estimates    a plan is ahead of all expected times
its table (``compared.py``)        bounds                  no bound could still change the choice
edits (``search.py``)              rough counts            an estimate is ahead of all hopes
the run to take (both)             the run to take         it is planned, and still is to be taken
several runs (``search.py``)       those to be named       all of them are searched
schedules (``schedules``)          bounds                  a plan is ahead of all other bounds
=================================  ======================  ======================================

What is put before this loop has an order of its own: alternatives of ``auto`` come by the number of
their changes (``alternatives.py``), the runs around the best one are raced until it stays the best
(``Search._vary``), and if nothing fits, the smallest combinations are estimated.

**The rule.** Of all runs that fit and are within ``NEAR`` of the fastest, the one that holds the
least is taken (``best_known``); a search of edits first prefers those with the fewest last resorts.
The rule is applied to all that is known at the end. So no run is taken that the table beside it
dominates, and table, choice and verdict cannot disagree.

**The end.** Work is counted, not timed: ``Watch`` adds up the seconds that bounds, trials and plans
would take a usual core. So the same question has the same answer on every machine. A limit of time
(``--search-seconds``) only cuts a search off, and then the search says so.
"""
