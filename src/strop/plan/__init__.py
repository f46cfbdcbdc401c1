"""What a run would take: its roles, memory, disk, time and the prompt that the model sees, without torch.

`planning.make_plan` says all of it before anything happens; `plan` has its parts as data, `locate` finds what
is on this disk, `roles` and `speeds` say who runs on which device and how fast, `estimate` how long. Nothing
is fetched or written. Not here: composing the run (run), price and limits of a site (launch).
"""
