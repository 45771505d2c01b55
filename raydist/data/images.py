"""Folders of images: one row an image, its class the folder it is in.

Columns: `image`, uint8, channels first (C, H, W), and `label`, int64, the number of the image's folder in the sorted
folder names; without folders there is no `label`. Pixels stay 0..255: scale them in a transform or in the model.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
from numpy.typing import NDArray

from raydist.data.files import DataFile
from raydist.data.formats import FileScan, Group
from raydist.errors import DataError

CHANNELS = {"RGB": 3, "L": 1, "RGBA": 4}


@dataclass
class ImageFiles:
    """Reads images. `size` is (height, width) to resize to; None wants all images of one size, and checks it.

    Every image is converted to `mode`: mixed modes are no error.
    """

    size: tuple[int, int] | None
    mode: str = "RGB"
    classes: tuple[str, ...] = ()
    _first: tuple[str, tuple[int, int]] | None = field(default=None, repr=False)

    def scan(self, fs: pafs.FileSystem, file: DataFile, columns: list[str] | None) -> FileScan:
        if file.size == 0:
            raise DataError(f"{file.path} is empty (0 bytes), so it is no image. Remove it.")
        # decoded size is not known without reading; assume pixels at three bytes for 10 bytes of a compressed file
        size = self.size[0] * self.size[1] * CHANNELS[self.mode] if self.size else file.size * 10
        return FileScan(self.schema(), (Group(1, size, (0, 0), {}),))

    def schema(self) -> pa.Schema:
        names = ["image", "label"] if self.classes else ["image"]
        kinds = {"image": pa.list_(pa.uint8()), "label": pa.int64()}
        return pa.schema([(name, kinds[name]) for name in names])

    def decode(self, fs: pafs.FileSystem, file: DataFile) -> NDArray[np.uint8]:
        """The pixels, (C, H, W). DataError names a file that is broken, or whose size differs from the first one's."""
        from PIL import Image, UnidentifiedImageError

        try:
            with fs.open_input_file(file.path) as opened:
                data = opened.read()
            with Image.open(io.BytesIO(data)) as image:
                found = (image.height, image.width)
                if self.size is not None and found != self.size:
                    picture = image.convert(self.mode).resize((self.size[1], self.size[0]), Image.Resampling.BILINEAR)
                else:
                    picture = image.convert(self.mode)
                pixels = np.asarray(picture, dtype=np.uint8)
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
            raise DataError(f"{file.path}: this image cannot be read: {error}. Mend or remove it.") from error
        if self.size is None:
            self._check_size(file, found)
        return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))

    def label(self, file: DataFile) -> int:
        return self.classes.index(class_of(file))

    def _check_size(self, file: DataFile, found: tuple[int, int]) -> None:
        if self._first is None:
            self._first = (file.path, found)
        elif self._first[1] != found:
            (path, (height, width)) = self._first
            raise DataError(
                f"{file.path} is {found[0]} x {found[1]} pixels (height x width) and {path} is {height} x {width}: "
                "set `images: {size: [height, width]}` to resize all of them"
            )


def class_of(file: DataFile) -> str:
    """The folder an image is in, '' at the top."""
    return file.name.rpartition("/")[0]


def classes_of(files: tuple[DataFile, ...]) -> tuple[str, ...]:
    """Class names, sorted; none where no image is in a folder. DataError when some are and some are not."""
    names = sorted({class_of(file) for file in files})
    if names == [""]:
        return ()
    if names[0] == "":
        stray = next(file.path for file in files if not class_of(file))
        raise DataError(f"{stray} is in no class folder while other images are: move it into one, or take the folders away")
    return tuple(names)
