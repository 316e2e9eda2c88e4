// Checks values that come from outside against shapes. A shape is a function that checks one value, `[shape]` for an
// array, or `{name: shape}` for an object, of which only the named fields are taken.

import { Failure } from "./api.js";

export function need(isTrue, message) {
  if (!isTrue) throw new Failure(message);
}

const is = (right, what) => (value, where) => {
  need(right(value), `\`${where}\` is not ${what}`);
  return value;
};

export const string = is((value) => typeof value === "string", "a string");
export const number = is(Number.isFinite, "a number");
export const boolean = is((value) => typeof value === "boolean", "true or false");
export const id = is((value) => typeof value === "string" && /^[\w-]{1,64}$/.test(value), "an id of letters and digits");
const object = is((value) => typeof value === "object" && value !== null && !Array.isArray(value), "an object");
const array = is(Array.isArray, "an array");

export const oneOf = (choices) => is((value) => choices.includes(value), `one of ${choices.join(", ")}`);

// A shape for a value that may be null or absent, and then stays null or absent.
export const maybe = (shape) => (value, where) => (value === null || value === undefined ? value : taken(value, shape, where));

export const mapOf = (shape) => (value, where) =>
  Object.fromEntries(Object.entries(object(value, where)).map(([name, each]) => [name, taken(each, shape, `${where}.${name}`)]));

export const pair = (first, second) => (value, where) => {
  need(array(value, where).length === 2, `\`${where}\` is not a pair`);
  return [taken(value[0], first, `${where}[0]`), taken(value[1], second, `${where}[1]`)];
};

// Returns the part of `value` that the shape names. Throws a Failure that names the first place where the shape does
// not fit.
export function taken(value, shape, where) {
  if (typeof shape === "function") return shape(value, where);
  if (Array.isArray(shape)) return array(value, where).map((each, i) => taken(each, shape[0], `${where}[${i}]`));
  object(value, where);
  return Object.fromEntries(Object.entries(shape).map(([name, each]) => [name, taken(value[name], each, where ? `${where}.${name}` : name)]));
}
