import csv
import pathlib
import sys

import numpy as np

root = pathlib.Path(sys.argv[1]).resolve()
rows = list(csv.DictReader(open(root / "hierarcaps_test.csv")))
paths = [root / "images" / row["image_url"].rpartition("/")[2] for row in rows]
for fold, test in enumerate(np.array_split(np.random.default_rng(0).permutation(len(rows)), 5)):
    with open(f"fold{fold}.csv", "w") as train_file, open(f"test{fold}.csv", "w") as test_file:
        train, tested = csv.writer(train_file), csv.writer(test_file)
        train.writerow(["path", "caption", "label", "split"])
        tested.writerow(["path", "caption"])
        for i, row in enumerate(rows):
            split = "test" if i in test else "train"
            train.writerow([paths[i], row["captions"], row["id"], split])
            if split == "test":
                tested.writerow([paths[i], row["captions"]])
