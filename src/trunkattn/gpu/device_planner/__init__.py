"""The planner's twin on the GPU; its files have the names of `trunkattn.planner`'s."""
