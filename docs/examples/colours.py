"""Colours as features."""

import numpy as np


class Colours:
    """The colours of an image that is resized to a square."""

    output = "colours"  # What features are, in words.

    def __init__(self, name):
        self.side = int(name)
        self.facts = ["colours", name]  # A saved gallery belongs to these.

    def prepare(self, image):
        return np.asarray(image.resize((self.side, self.side)), np.float32)

    def features(self, prepared):
        return np.stack(prepared).reshape(len(prepared), -1)
