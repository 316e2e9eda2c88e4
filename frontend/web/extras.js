// The additions to every question of a tab: a system prompt, tools, a JSON schema. The fold names the additions in use.

import { Failure } from "./api.js";

const SAMPLES = {
  tools: [
    {
      type: "function",
      function: {
        name: "get_weather",
        description: "The weather in a city.",
        parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
      },
    },
  ],
  response_format: {
    type: "object",
    properties: { animal: { enum: ["cat", "dog", "bird"] }, name: { type: "string", maxLength: 12 }, legs: { enum: [2, 4] } },
    required: ["animal", "name", "legs"],
    additionalProperties: false,
  },
};
const NAMES = { system: "System prompt", tools: "tools", response_format: "JSON schema" };

export class Extras {
  // `offered`: the names of the fields that this tab has; the other fields are removed.
  constructor(root, offered) {
    const all = [...root.querySelectorAll("textarea")];
    this.fields = all.filter((field) => offered.includes(field.name));
    for (const field of all) if (!this.fields.includes(field)) field.parentElement.remove();
    this.root = root;
    root.querySelector(".names").textContent = this.fields.map((field) => NAMES[field.name]).join(", ");
    root.addEventListener("input", () => this.#sayUsed());
    root.addEventListener("click", (event) => event.target.matches(".sample") && this.#fillIn(event.target));
  }

  #fillIn(button) {
    const field = button.parentElement.querySelector("textarea");
    field.value = JSON.stringify(SAMPLES[field.name], null, 1);
    field.dispatchEvent(new Event("input", { bubbles: true }));
    field.setSelectionRange(0, 0);
    field.focus();
  }

  #sayUsed() {
    const used = this.fields.filter((field) => field.value.trim()).map((field) => NAMES[field.name]);
    this.root.querySelector(".used").textContent = used.length ? `in use: ${used.join(", ")}` : "";
  }

  // The fields in use, as {field: text}.
  get values() {
    return Object.fromEntries(this.fields.filter(({ value }) => value.trim()).map(({ name, value }) => [name, value]));
  }

  fill(values) {
    for (const field of this.fields) field.value = values[field.name] ?? "";
    this.#sayUsed();
  }

  #text(name) {
    return this.fields.find((field) => field.name === name)?.value.trim() ?? "";
  }

  get system() {
    return this.#text("system");
  }

  // The fields of a request, as {field: JSON text}. Throws a Failure for invalid JSON.
  get asked() {
    const [tools, schema] = [this.#json("tools"), this.#json("response_format")];
    return {
      ...(tools && { tools }),
      ...(schema && { response_format: `{"type":"json_schema","json_schema":{"name":"answer","schema":${schema}}}` }),
    };
  }

  #json(name) {
    const text = this.#text(name);
    try {
      if (text) JSON.parse(text);
    } catch (error) {
      throw new Failure(`the ${NAMES[name]} field is not JSON: ${error.message}`, { param: name });
    }
    return text;
  }
}
