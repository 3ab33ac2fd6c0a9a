"""Console scripts: hypjax-train runs hypjax.main, hypjax-embed runs hypjax.embed, and so on."""

import functools
import runpy

_run = functools.partial(runpy.run_module, run_name="__main__", alter_sys=True)

train = functools.partial(_run, "hypjax.main")
prepare = functools.partial(_run, "hypjax.prepare")
embed = functools.partial(_run, "hypjax.embed")
search = functools.partial(_run, "hypjax.search")
compare = functools.partial(_run, "hypjax.compare")
tune = functools.partial(_run, "hypjax.tune")
export = functools.partial(_run, "hypjax.export")
convert = functools.partial(_run, "hypjax.convert")
hyperbolicity = functools.partial(_run, "hypjax.hyperbolicity")
hierarchy = functools.partial(_run, "hypjax.hierarchy")
spectrum = functools.partial(_run, "hypjax.spectrum")
negatives = functools.partial(_run, "hypjax.negatives")
plot = functools.partial(_run, "hypjax.plot")
report = functools.partial(_run, "hypjax.report")
benchmark = functools.partial(_run, "hypjax.benchmark")
