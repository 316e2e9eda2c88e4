// The tool calls of an answer, and the fields for their results.

export const copyOf = (id) => document.getElementById(id).content.cloneNode(true);

export class Calls {
  #form;
  #blocks = [];
  #list = []; // the calls, as in a message: {id, type, function: {name, arguments}}

  constructor(form) {
    this.#form = form;
  }

  // Shows the calls as far as they have arrived.
  show(list) {
    this.#list = list;
    for (const [index, { function: call }] of list.entries()) {
      this.#blocks[index] ??= this.#begin(call.name);
      const box = this.#blocks[index].querySelector(".arguments");
      if (box.textContent !== call.arguments) box.textContent = call.arguments;
    }
  }

  #begin(name) {
    const fresh = copyOf("call");
    const block = fresh.querySelector(".call");
    fresh.querySelector(".name").textContent = name;
    this.#form.append(fresh);
    this.#form.hidden = false;
    return block;
  }

  // Shows the results that were sent, which can no longer be changed.
  close(results) {
    for (const [i, block] of this.#blocks.entries()) {
      const [label, field] = [block.querySelector(".result"), block.querySelector("textarea")];
      label.hidden = false;
      field.readOnly = true;
      field.value = results[i]?.content ?? field.value;
    }
    for (const button of this.#form.querySelectorAll("button")) button.remove();
  }

  // Shows a field for the result of each call; `give(messages)` receives the results.
  offer(give) {
    if (this.#form.querySelector("button")) return;
    const fields = this.#blocks.map((block) => block.querySelector("textarea"));
    for (const block of this.#blocks) block.querySelector(".result").hidden = false;
    for (const field of fields) field.readOnly = false;
    const button = document.createElement("button");
    button.textContent = fields.length > 1 ? "Go on with these results" : "Go on with this result";
    this.#form.append(button);
    this.#form.onsubmit = (event) => {
      event.preventDefault();
      give(fields.map((field, i) => ({ role: "tool", tool_call_id: this.#list[i].id, content: field.value })));
    };
  }
}
