"""What setup.cfg cannot say: on a package index, relative links of the README lead nowhere.

HYPJAX_SOURCE is the address of the repository; without it, links stay as they are.
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
    shown = {"long_description": readme, "project_urls": {"Source": source}}
setuptools.setup(**shown)
