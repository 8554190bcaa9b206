"""The page of runs: plain modules of JavaScript, and how one file is made of them.

`index.html` loads `main.js`, which shows what a data layer gives it (`data.js`): a server, or the runs that a file
holds. There is no build step: a browser reads the modules as they are, and `bundle` joins them for a report.
"""
