"""What in a codebase will not port to TPU, found in its source alone: nothing of it is imported, and neither is torch.

    report = scanning.scan(path, ["pkg.model:Network"], folders)

From the first step to the last: `syntax` (a file as events), `codebase` (the files, and who is meant by a name in
them), `detect` (the findings of a function), `facts` (what is kept of it when its syntax tree is dropped), `reach`
(what an entry leads to), and `scanning`, where they meet what shipped patches take care of. `finding` says what each
finding means, and holds all that a draft needs.
"""
