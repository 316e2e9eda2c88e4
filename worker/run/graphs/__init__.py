"""Captures and replays steps as CUDA graphs.

graph_inputs        holds the inputs of captured steps at fixed addresses
page_lanes          keeps the page tables of running sequences on the device
graphs              runs steps as CUDA graphs
graph_shapes        lists the shapes that are captured, and finds the shape of a step
graph_capture       captures the forward of one shape
graph_adapters      keeps the captured forwards of steps with LoRA adapters
adapters_in_graphs  adds the products of adapters in captured steps
graph_sampling      captures the sampling of plain rows
graph_self_test     makes the dummy steps that graphs are tested with
"""
