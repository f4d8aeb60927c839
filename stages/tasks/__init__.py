"""Tasks, one folder each. A stage loads just the module of a task that it needs, by name: no registry, no base class.

sources  reads raw data and writes prepared records            (prepare)
samples  records, prompts and the form of completions          (plan, train, merge, evaluate)
scoring  compares completions with the truth                   (evaluate)
report   columns and insights of the comparison                (compare)
predictions  reads inputs without truth, writes completions    (predict)

The first three are folders also where one module would do (then it is their `__init__.py`): dvc.yaml names them for
all tasks alike. A task that has no unlabeled inputs has no `predictions`.
"""
