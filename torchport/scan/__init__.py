"""What in a codebase will not port to TPU, found in its source alone: nothing of it is imported, and neither is torch.

    report = scan.scan(path, ["pkg.model:Network"], folders)

From the first step to the last: `files` (what is read), `syntax` (a file as events), `codebase` (who is meant by a
name), `detect` (the findings of a function), `constants` and `reach` (what an entry leads to), `coverage` (which
patches take care of what), `scan`, where they meet. `rules` says what each finding means.
"""

from torchport.scan.finding import Finding as Finding
from torchport.scan.finding import Report as Report
from torchport.scan.scan import scan as scan
