"""Write scikit-learn's bundled handwritten digits as parquet: `python jobs/data/digits.py`.

1,797 grey 8×8 images (the test part of "Optical Recognition of Handwritten Digits", UCI). Columns: `pixels`, 64 float32 in
[0, 1], row by row; `label`, int64 in 0..9. Of every digit each fifth image goes to `eval`, the others to `train`.
Needs `pip install 'raydist[jobs]'`.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FOLDER = Path(__file__).resolve().parent / "digits"
ROWS = {"train": 1433, "eval": 364}
FILES = {"train": 4, "eval": 2}
ROW_GROUP = 100


def write_digits(folder: Path = FOLDER) -> bool:
    """Write `folder`/train and `folder`/eval. False when they are there already, complete.

    The folder appears under its name only when it is whole; one that is damaged is written again.
    """
    if _is_complete(folder):
        return False
    from sklearn.datasets import load_digits  # one second to import, and not needed when the data is there

    images, labels = load_digits(return_X_y=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        written = Path(scratch) / folder.name
        for split, rows in split_rows(labels).items():
            (written / split).mkdir(parents=True)
            for number, part in enumerate(np.array_split(rows, FILES[split])):
                table = _table(images[part], labels[part])
                pq.write_table(table, written / split / f"part-{number}.parquet", row_group_size=ROW_GROUP)
        if folder.exists():
            shutil.rmtree(folder)
        written.rename(folder)
    return True


def split_rows(labels: np.ndarray) -> dict[str, np.ndarray]:
    """Row numbers of each split, in order: every fifth image of each digit is held out."""
    held_out = np.zeros(len(labels), dtype=bool)
    for digit in np.unique(labels):
        held_out[np.flatnonzero(labels == digit)[::5]] = True
    return {"train": np.flatnonzero(~held_out), "eval": np.flatnonzero(held_out)}


def _table(images: np.ndarray, labels: np.ndarray) -> pa.Table:
    pixels = (images / 16).astype(np.float32)  # the images hold 0..16
    return pa.table(
        {
            "pixels": pa.FixedSizeListArray.from_arrays(pa.array(pixels.reshape(-1)), pixels.shape[1]),
            "label": pa.array(labels.astype(np.int64)),
        }
    )


def _is_complete(folder: Path) -> bool:
    for split, rows in ROWS.items():
        parts = sorted((folder / split).glob("part-*.parquet"))
        if len(parts) != FILES[split]:
            return False
        try:
            if sum(pq.read_metadata(part).num_rows for part in parts) != rows:
                return False
        except pa.ArrowInvalid:  # a file cut short by something else than this script
            return False
    return True


if __name__ == "__main__":
    print(f"{FOLDER}: {'written' if write_digits() else 'already there'}")
