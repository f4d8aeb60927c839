"""Where the domains' data comes from: files of TruthfulQA or QMSum, two small worlds, or prepared datasets."""

from stages.tasks.moe.sources.preparation import mix, read

__all__ = ["mix", "read"]
