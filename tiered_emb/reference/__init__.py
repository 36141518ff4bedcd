"""The main job: a click model (DLRM) trained over tiered tables, from a file of clicks to a report.

In reading order: `job` (one run from options to report), `training` (the step), `dlrm` (the model), `stream` (what a
data set offers) with `criteo`, `movielens` and `synthetic`, `check` (the same run on whole tables), `report`,
`progress` and `words`.
"""

from __future__ import annotations
