"""The handwritten digits that the classifier is trained and tested on. Imports no torch."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SIZE = 8
_SPLIT_SEED = 20


@dataclass(frozen=True, slots=True)
class DigitSplit:
    """Images are uint8 (n, 8, 8), 0 for no ink and 255 for full ink; labels are int64 (n,)."""

    train_images: npt.NDArray[np.uint8]
    train_labels: npt.NDArray[np.int64]
    test_images: npt.NDArray[np.uint8]
    test_labels: npt.NDArray[np.int64]


def load_split() -> DigitSplit:
    """scikit-learn's 1,797 digits; every third part of each class is held out, the same every time."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    # scikit-learn counts ink from 0 to 16.
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    labels = digits.target.astype(np.int64)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=1 / 3, random_state=_SPLIT_SEED, stratify=labels
    )
    return DigitSplit(train_images, train_labels, test_images, test_labels)
