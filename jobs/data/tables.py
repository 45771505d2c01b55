"""Write two of scikit-learn's bundled tables as parquet: `python jobs/data/tables.py`.

`breast_cancer` (569 tumours, 30 measures; Wolberg et al., UCI): `target` is 0 malignant, 1 benign. `diabetes` (442 people, 10
numbers; Efron et al., 2004): `target` is the progress of the disease after a year. Every fifth row, in a fixed random order, is
held out. Needs `pip install 'raydist[jobs]'`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FOLDER = Path(__file__).resolve().parent
TABLES = ("breast_cancer", "diabetes")


def write_table(name: str, folder: Path = FOLDER) -> bool:
    """Write `folder`/name/train.parquet and eval.parquet. False when both are there already."""
    files = {part: folder / name / f"{part}.parquet" for part in ("train", "eval")}
    if all(file.exists() for file in files.values()):
        return False
    from sklearn import datasets  # one second to import, and not needed when the data is there

    loaded = getattr(datasets, f"load_{name}")()
    columns = {"_".join(str(feature).split()): loaded.data[:, at] for at, feature in enumerate(loaded.feature_names)}
    table = pa.table({**columns, "target": loaded.target})
    order = np.random.default_rng(0).permutation(table.num_rows)
    held_out = np.arange(table.num_rows) % 5 == 0
    files["train"].parent.mkdir(parents=True, exist_ok=True)
    for part, file in files.items():
        scratch = file.with_suffix(".part")
        pq.write_table(table.take(order[held_out == (part == "eval")]), scratch)
        scratch.replace(file)
    return True


if __name__ == "__main__":
    for name in TABLES:
        print(f"{FOLDER / name}: {'written' if write_table(name) else 'already there'}")
