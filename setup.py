"""Completes the README for a package index: relative links and the placeholder lead nowhere there.

HYPJAX_SOURCE is the address of the repository; without it, the README stays as it is.
"""

import os
import pathlib
import re

import setuptools

source = os.environ.get("HYPJAX_SOURCE", "").rstrip("/")
shown = {}
if source:
    readme = pathlib.Path(__file__).with_name("README.md").read_text()
    readme = re.sub(r"!\[([^\]]*)\]\((?!http)", rf"![\1]({source}/raw/main/", readme)
    readme = re.sub(r"(?<!\!)\]\((?!http|#|mailto:)", rf"]({source}/blob/main/", readme)
    readme = readme.replace("https://github.com/OWNER/hypjax", source)
    shown = {"long_description": readme, "project_urls": {"Source": source}}
setuptools.setup(**shown)
