#!/usr/bin/env bash
# Draws every picture of README.md and docs/ again. Trains the runs that are missing: 24 of letters,
# about two and a half hours on two CPU cores, and 25 heads on photographs of groceries, which must
# have been prepared. Needs pip install -e ".[lite,viz,ann,serve]", faiss-cpu and chromium.
# Further fields apply to all runs:
# RUNS=/tmp/runs OUTPUT=/tmp/pictures launch/pictures.sh --config.train.total_steps=100
set -euo pipefail
runs=${RUNS:-runs} output=${OUTPUT:-docs} fields=("$@")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# run CONFIG NAME [FIELD...]
run() { python -m hypjax.main --config="configs/$1" --workdir="$runs/$2" "${@:3}" "${fields[@]}"; }
# train VARIANT NAME [FIELD...]: letters.
train() { run "glyphs.py:$1" "${@:2}"; }
# shop VARIANT NAME [FIELD...]: groceries, by heads on one encoder's features.
shop() { run "grocery.py:$1-lite,frozen" "${@:2}"; }
plot() { python -m hypjax.plot "$@"; }

python docs/drawings.py "$output/system.svg"

shop hyp grocery-hyp
plot hits --workdir="$runs/grocery-hyp" --queries=6 --k=7 --output="$output/grocery-hits.jpg"
plot disk --workdir="$runs/grocery-hyp" --thumbnails --output="$output/grocery-disk.jpg"

for space in hyp sph; do
  for dimension in 8 32 128 512; do
    for seed in 0 1 2; do
      shop "$space" "dimension/$space-$dimension-$seed" --config.model.head_dim="$dimension" \
        --config.seed="$seed" --config.run.report=False
    done
  done
done
python -m hypjax.compare "$runs"/dimension/* --x=model.head_dim --output="$output/dimension.png"

train hyp glyphs-hyp
plot disk --workdir="$runs/glyphs-hyp" --thumbnails --output="$output/disk.png"
plot disk --workdir="$runs/glyphs-hyp" --layout=umap --images=4000 --parts=train,test \
  --output="$output/umap.png"
plot grid --workdir="$runs/glyphs-hyp" --layout=umap --output="$output/grid.jpg"
python -m hypjax.export --output="$scratch/letters"
python -m hypjax.embed --workdir="$runs/glyphs-hyp" --images="$scratch/letters/test" \
  --output="$scratch/gallery.npz"
python -m hypjax.search --workdir="$runs/glyphs-hyp" --gallery="$scratch/gallery.npz" --k=9 \
  --query="$scratch/letters/test/[FßŢЩ] */U+* DejaVuSans-Bold.png" --output="$output/neighbours.png"
python -m hypjax.serve --workdir="$runs/glyphs-hyp" --gallery="$scratch/gallery.npz" --port=8765 \
  >"$scratch/served" &
until grep -q http "$scratch/served"; do kill -0 $!; sleep 1; done
chromium --headless --no-sandbox --window-size=1100,920 --virtual-time-budget=20000 \
  --screenshot="$output/serve.png" "http://127.0.0.1:8765/#5"
kill -INT $!

train sph glyphs-sph
python -m hypjax.negatives --workdir="$runs/glyphs-hyp" --workdir="$runs/glyphs-sph" --show=2 \
  --output="$scratch/negatives.png"
cp "$scratch"/negatives{,-hardest}.png "$output"

train hier glyphs-hier-chosen --config.objective.alpha=16 --config.objective.hier_weight=0.1 \
  --config.objective.hier_rate=1
python -m hypjax.hierarchy --workdir="$runs/glyphs-hier-chosen" --images=1000 \
  --output="$scratch/hierarchy"
for name in disk affinity leaves; do
  cp "$scratch/hierarchy/glyphs-hier-chosen/$name.png" "$output/hierarchy-$name.png"
done

train irt-l glyphs-irt-l
train irt-r glyphs-irt-r
python -m hypjax.spectrum --workdir="$runs/glyphs-irt-l" --workdir="$runs/glyphs-irt-r" \
  --output="$scratch/spectrum.png"
cp "$scratch/spectrum.png" "$output"

# sweep VARIANT c TEMPERATURE...
sweep() {
  for temperature in "${@:3}"; do
    train "$1" "sweep/$1-$2-$temperature" --config.objective.c="$2" \
      --config.objective.temperature="$temperature" --config.run.report=False
  done
}
sweep sph 0.1 0.0125 0.025 0.05 0.1 0.2 0.5 1
sweep hyp 0.1 0.025 0.05 0.1 0.2 0.5 1
sweep hyp 0.01 0.05 0.2 1
sweep hyp 1 0.05 0.2 1
python -m hypjax.compare "$runs"/sweep/* --x=objective.temperature --output="$output/temperature.png"

python -m benchmarks ann --output="$scratch/recall-speed.json"
cp "$scratch/recall-speed.png" "$output"

# Palettes of 256 colours: files of half the size or less, which look the same.
python - "$output"/*.png <<'PYTHON'
import sys
from PIL import Image

for path in sys.argv[1:]:
    Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
PYTHON
