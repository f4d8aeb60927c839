"""Tasks, one folder each. A stage loads just the module of a task that it needs, by name: no registry, no base class.

sources  reads raw data and writes prepared records            (prepare)
samples  records, what the model is asked and how it answers   (plan, train, merge, evaluate)
scoring  compares answers with the truth                       (evaluate)
report   columns and insights of the comparison                (compare)
predictions  reads inputs without truth, writes answers        (predict)

The first three are folders also where one module would do (then it is their `__init__.py`): dvc.yaml names them for
all tasks alike. A task whose models only ever answer its own validation samples has no `predictions`.
"""
