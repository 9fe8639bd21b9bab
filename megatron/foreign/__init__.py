"""Launch scripts and configurations of other programs, read as text: nothing of them is run.

The files in the order in which a script goes through them:

    read                 from a file to its trainings; configs and torchtitan read YAML and TOML,
                         torchtitan_keys: which keys of torchtitan are known
      python_config      configurations in Python, as python_data reads them without running them
      python_expressions python_changes   values of expressions, and what statements change;
                         python_operations: sums of known values; python_reach: what code that is
                         not followed may change
    words tokens         the text as words, and a word as pieces with and without quotes
    syntax statements    words as commands, branches and loops
    sourced              files that a script reads by source
    walk                 goes through the statements; simple: a single command; variables: what
                         commands make of the script's variables
      chains conditions  commands joined by && or ||; whether a branch is taken
      assigned           names to which statements assign that are not followed
    expand               variables in words; values: known texts, and holes for unknown ones
      patterns sums      ${A%b} and $((a + b))
    launches             the torchrun, srun or deepspeed command that starts a training
    flags judge          the training's flags, and what pretrain_gpt.py answers to each
    predict              seconds of the line with a whole and with a split vocabulary
    line page as_json    the line to run; the answer as text, and as data
    merge                variables of branches of which only a run takes one
    faults               errors, and limits against scripts that would take for ever
"""
