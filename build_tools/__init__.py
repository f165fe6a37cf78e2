"""The build: plan, trace, compile, manifest, codegen, embed, one file a stage. Run as `python -m build_tools`."""
